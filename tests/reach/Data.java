import java.util.HashMap;
import java.util.Map;
import java.util.Scanner;

/** As data.py, for a Java machine. */
public class Data {
    static final Map<String, byte[]> RECORDS = new HashMap<>();
    static volatile Object garbage;

    static String work(int turn) {
        long total = 0;
        for (Map.Entry<String, byte[]> record : RECORDS.entrySet())
            for (byte one : record.getValue())
                total += one * (long) record.getKey().length();
        StringBuilder text = new StringBuilder();
        for (int number = 0; number < 20000; number++) {
            garbage = new byte[512];
            text.append(number % 10);
        }
        RECORDS.get("key 0")[turn % 512] ^= 0;
        return total + "-" + text.toString().hashCode();
    }

    public static void main(String[] args) {
        int mib = Integer.parseInt(args[0]);
        for (int number = 0; number < mib * 1000; number++) {
            byte[] value = new byte[1024];
            for (int at = 0; at < value.length; at++)
                value[at] = (byte) (number * 31 + at);
            RECORDS.put("key " + number, value);
        }
        System.gc();
        System.out.println("ready");
        System.out.flush();
        Scanner lines = new Scanner(System.in);
        for (int turn = 0; lines.hasNextLine() && lines.nextLine().equals("work"); turn++) {
            long begun = System.nanoTime();
            String answer = work(turn);
            System.out.println(answer + " " + (System.nanoTime() - begun) / 1000000);
            System.out.flush();
        }
    }
}
